"""What a file means: schedules, dispatches and plans of documents, with ranks and steps resolved."""
