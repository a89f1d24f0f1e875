"""What all drafters by heads share: how much memory they take, and saying so."""

from __future__ import annotations

from slipstream.drafters.base import Drafter


class HeadDrafter(Drafter):
    """A drafter over a head. weights_bytes: as stored. kv_bytes_per_token: of its own cache."""

    weights_bytes: int
    kv_bytes_per_token: int

    def takes(self) -> str:
        """Its memory in words."""
        text = f"head {self.name} {self.weights_bytes / 1e6:.1f} MB"
        return f"{text}, {self.kv_bytes_per_token} bytes of cache per token" if self.kv_bytes_per_token else text
