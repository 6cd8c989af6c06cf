"""Plans: TOML files that list runs, and the code that trains those runs."""
