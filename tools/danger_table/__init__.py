"""The program that makes the table of dangerous functions."""
