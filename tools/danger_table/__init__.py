"""How the table of dangerous functions is made."""
