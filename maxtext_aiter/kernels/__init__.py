"""Flash attention in Triton. Importing this package imports no Triton; its modules do, when first used."""
