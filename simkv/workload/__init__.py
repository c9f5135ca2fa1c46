"""What clients send: forms, generators, lengths of requests, and the formats of traces."""
