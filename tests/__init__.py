"""Tests of kvshm; helpers that several of them share are in :mod:`tests.support`."""
