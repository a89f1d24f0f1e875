"""Training of draft heads: prompts, answers written by the target, features, the loop, evaluation."""
