"""What is written: `.comm` text, its Syntax, and what is said about both."""
