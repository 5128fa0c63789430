"""Programs that XLA compiled: where they are kept between processes."""
