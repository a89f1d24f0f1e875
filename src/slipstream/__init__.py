"""Slipstream: large language models answer faster, with the same output."""
