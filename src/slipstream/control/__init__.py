"""Controllers: how much to draft, and which of the offered nodes are worth verifying."""
