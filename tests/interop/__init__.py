"""Tests against a real LMCache. ``make interop`` runs them; a plain run of pytest does not collect them."""
