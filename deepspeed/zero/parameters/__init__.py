"""All-gather and resharding of parameters, with the module hooks. Independent of gradients."""
