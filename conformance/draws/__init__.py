"""Whole runs of rollmatch drawn at random, each compared with the oracle's."""
