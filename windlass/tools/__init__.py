"""Programs that measure or prepare."""
