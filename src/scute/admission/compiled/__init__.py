"""Compiled folders: the normal form of an adapter on disk, written and read to the bit."""
