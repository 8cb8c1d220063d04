"""The models that prove the channel and the ordering protocol, and what runs them."""
