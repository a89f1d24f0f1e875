"""Drafting by heads on the target's hidden states: EAGLE-1/2, EAGLE-3 and Medusa."""
