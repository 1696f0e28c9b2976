"""The cache client, of the extra ``kvshm[server]``: one for kvshm's own server and for a real LMCache."""
