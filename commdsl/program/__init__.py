"""What is launched: the Plan, how it comes from the IR, and what is proved of it."""
