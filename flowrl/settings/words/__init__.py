"""Names of settings and their short forms, and sentences about mistakes in them."""
