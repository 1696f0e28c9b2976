"""The demonstration behind ``kvshm demo``: two engine processes, one cache server, the same pages.

Rooms, lowest first: ``model`` (a NumPy transformer), ``paged_cache`` (where its K and V live), ``channel`` (messages
between two processes), ``engine`` (the process that computes), ``run`` (the process that starts and ends the server and
the engines), ``report`` (what is printed), ``command`` (the command line).
"""
