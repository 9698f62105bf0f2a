"""Old addresses: what is here lives elsewhere, and nobody inside imports it from here."""
