"""The cache server, of the extra ``kvshm[server]``: a socket, a loop, books, and threads that copy."""
