"""All-gathers and reshards parameters, with the module hooks. Independent of gradients."""
