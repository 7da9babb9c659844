"""The page that converts in the browser, and what builds it."""
