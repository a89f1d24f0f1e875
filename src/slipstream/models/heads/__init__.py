"""Drafting heads on disk: what one is (`config`), its tensors (`head`), the formats it is kept in (`formats`)."""
