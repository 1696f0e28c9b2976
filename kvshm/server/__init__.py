"""The cache server, of the extra ``kvshm[server]``: a socket, a loop that owns the state, and threads that copy."""
