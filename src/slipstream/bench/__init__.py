"""Measurements: settings of speculation on one model, and load on a server."""
