"""All-gathers and reshards parameters, and the module hooks that do. Knows no gradient."""
