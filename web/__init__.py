"""The page that converts checkpoints in the browser, and the program that builds it."""
