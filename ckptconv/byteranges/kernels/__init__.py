"""Loops over numbers that need torch. Imported only when a conversion casts, gathers, assembles or compares numbers."""
