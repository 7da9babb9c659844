"""Files that are far away, read by position: over http(s), from S3, from the Hub, and from what fsspec knows.

Nothing here is imported before a URL is given. ``urls`` reads URLs and shows them without secrets; ``source`` is the
file that readers ask for bytes; ``planning`` says which ranges are asked of the server, how large and how many at once;
``requests`` asks for one, again where that may help, until a deadline; ``http``, ``s3`` and ``others`` carry it out.
"""
