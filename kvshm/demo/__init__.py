"""The demonstration behind ``kvshm demo``: two engine processes, one cache process, the same pages.

Rooms, lowest first: ``model`` (a NumPy transformer), ``paged_cache`` (where its K and V live), ``channel`` (messages
between two processes), ``cache`` (the process that keeps chunks), ``engine`` (the process that computes), ``run`` (the
process that starts and ends the others), ``report`` (what is printed), ``command`` (the command line).
"""
