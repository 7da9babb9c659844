"""Change a file where it stands, under an undo journal that gives the old bytes back."""
