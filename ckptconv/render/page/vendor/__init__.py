"""JavaScript of others that pages contain, its licences, and what makes it again of what its authors published."""
