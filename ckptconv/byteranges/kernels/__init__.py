"""Loops over numbers that need torch. Imported only when numbers are cast, gathered, assembled or compared."""
