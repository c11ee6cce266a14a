"""Libraries whose models outcore trains: one module each."""
