"""JavaScript of others that pages contain, its licences, and the script that fetches it again from its authors."""
