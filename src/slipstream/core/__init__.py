"""Types every layer shares: parameters, drafts, verdicts, rows, errors. Imports nothing of ours."""
