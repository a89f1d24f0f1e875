"""Settings for all tests."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

# Bounded by the number of examples, not by time: a loaded machine must not make a test fail. The database is off so
# that a run depends on nothing an earlier run left behind.
settings.register_profile("slipstream", deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("slipstream")
