"""The laws of Plans."""
