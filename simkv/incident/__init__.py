"""From what a production server writes to the victim, the cause and the flag that mends it."""
