"""The native runtime: CPU only, no torch; results do not depend on what else is in a pass."""
