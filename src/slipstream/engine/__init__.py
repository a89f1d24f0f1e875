"""The engine: the step, requests, scheduling, stop rules, incremental text, statistics."""
