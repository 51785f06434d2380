"""What is chosen for the user: who computes which part of uneven documents."""
