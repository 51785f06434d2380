"""What a schedule costs on its machine, against the least that anything costs there, in numbers and pictures."""
