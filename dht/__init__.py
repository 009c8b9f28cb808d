"""dht finds: identities, signed records, and the directory they are announced in."""
