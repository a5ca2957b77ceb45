//! The definition of `GpuPolicy`.

use serde_json::{Value, json};

use super::{Names, column, definition, number, object, one_of, rule, set, text, with};
use crate::policy::{KIND, MOST_RULES, MOST_SLOTS, PLURAL};

const LABEL: &str = r"^([A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?)?$";
const LABEL_KEY: &str = r"^([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?$";
const DNS_NAME: &str = r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$";

/// The definition of `GpuPolicy`.
pub fn gpu_policy() -> Value {
    let names = Names { kind: KIND, plural: PLURAL, singular: "gpupolicy", short: "gpupol" };
    let columns = [
        column(
            "Priority",
            "integer",
            ".spec.priority",
            "Higher is tried first; among equals the name decides",
        ),
        column("Nodes", "string", ".spec.nodes.names", "Nodes by name, if the policy names some"),
        column("Rules", "string", ".spec.rules[*].name", "Names of the rules"),
        column("Modes", "string", ".spec.rules[*].modes", "What the rules offer GPUs as"),
        column(
            "Mode Lock",
            "string",
            ".spec.modeLock",
            "Whether one GPU may be offered in several modes at once",
        ),
        column("Age", "date", ".metadata.creationTimestamp", "Age"),
    ];
    let schema = with(
        object(
            "GpuPolicy says what the GPUs of which nodes may become: whole GPUs, MIG partitions, time-sliced shares. \
             Policies are tried by priority, then by name; the first rule that matches node and GPU decides \
             everything about that GPU. GPUs without a rule are offered as their MIG mode is.",
            json!({
                "apiVersion": { "type": "string" },
                "kind": { "type": "string" },
                "metadata": { "type": "object" },
                "spec": spec(),
            }),
        ),
        json!({ "required": ["spec"] }),
    );
    definition(&names, &schema, &columns, false)
}

fn spec() -> Value {
    let rules = json!({
        "type": "array",
        "description": "The first rule that matches node and GPU decides.",
        "maxItems": MOST_RULES,
        "x-kubernetes-list-type": "atomic",
        "items": policy_rule(),
        "x-kubernetes-validations": [rule(
            "self.all(r, !has(r.name) || self.exists_one(other, has(other.name) && other.name == r.name))",
            "two rules have the same name",
        )],
    });
    object(
        "What the policy says.",
        json!({
            "priority": with(
                number("Policies with a higher number are tried first; among equals the name decides.", -1_000_000, 1_000_000),
                json!({ "format": "int32", "default": 0 }),
            ),
            "nodes": nodes("The nodes that the policy is for; all if left out."),
            "modeLock": one_of(
                "Whether one GPU may be offered in several modes at once, of which the first claim decides: Auto \
                 (where the cluster's version allows it; the default), Enabled, Disabled. The first policy that is for the node \
                 and says it decides.",
                &["Auto", "Enabled", "Disabled"],
            ),
            "rules": rules,
        }),
    )
}

fn nodes(description: &str) -> Value {
    let name = with(text("Name of a node."), json!({ "maxLength": 253, "pattern": DNS_NAME }));
    let label = with(text("Value of a label."), json!({ "maxLength": 63, "pattern": LABEL }));
    let expression = with(
        object(
            "A requirement on one label.",
            json!({
                "key": with(text("The label."), json!({ "maxLength": 317, "pattern": LABEL_KEY })),
                "operator": one_of("How it is compared.", &["In", "NotIn", "Exists", "DoesNotExist"]),
                "values": with(
                    set("With what; for In and NotIn only.", 64, &label),
                    json!({ "minItems": 0 }),
                ),
            }),
        ),
        json!({
            "required": ["key", "operator"],
            "x-kubernetes-validations": [rule(
                "self.operator in ['In', 'NotIn'] ? has(self.values) && size(self.values) > 0 : !has(self.values) || size(self.values) == 0",
                "In and NotIn need values, Exists and DoesNotExist have none",
            )],
        }),
    );
    let selector = object(
        "Nodes by their labels.",
        json!({
            "matchLabels": {
                "type": "object",
                "description": "Labels with these values.",
                "maxProperties": 64,
                "additionalProperties": label,
            },
            "matchExpressions": {
                "type": "array",
                "description": "More than equality; all of them must fit.",
                "maxItems": 32,
                "x-kubernetes-list-type": "atomic",
                "items": expression,
            },
        }),
    );
    with(
        object(
            &format!("{description} A node fits that is named or selected."),
            json!({ "names": set("Nodes by name.", 512, &name), "selector": selector }),
        ),
        json!({ "minProperties": 1 }),
    )
}

fn gpus() -> Value {
    let uuid = with(
        text("UUID of a GPU."),
        json!({ "maxLength": 40, "pattern": "^GPU-[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}$" }),
    );
    let product = with(
        text("Name of a product, letter case aside; * stands for any text."),
        json!({ "minLength": 1, "maxLength": 128 }),
    );
    let pci = with(
        text("PCI address of a GPU."),
        json!({ "maxLength": 16, "pattern": "^([0-9a-fA-F]{4}|[0-9a-fA-F]{8}):[0-9a-fA-F]{2}:[01][0-9a-fA-F]\\.[0-7]$" }),
    );
    with(
        object(
            "The GPUs that the rule is for; all if left out. A GPU fits that any entry of any list fits.",
            json!({
                "uuids": set("GPUs by UUID.", 64, &uuid),
                "ordinals": set(
                    "GPUs by the number in the name of their devices: 3 for gpu-3.", 64,
                    &number("Number of a GPU.", 0, 65_535),
                ),
                "products": set("GPUs by product, such as *H100*.", 32, &product),
                "pciAddresses": set("GPUs by PCI address, such as 0000:3b:00.0.", 64, &pci),
            }),
        ),
        json!({ "minProperties": 1 }),
    )
}

fn policy_rule() -> Value {
    with(
        object(
            "What may be done with the GPUs that it matches. What is left out is as without a policy.",
            json!({
                "name": with(
                    text("For people, and where the rule is named."),
                    json!({ "minLength": 1, "maxLength": 63, "pattern": LABEL }),
                ),
                "nodes": nodes("The nodes that the rule is for, among those of the policy; all of them if left out."),
                "gpus": gpus(),
                "modes": set(
                    "What the GPUs are offered as; if left out, as their MIG mode is: off, Whole; on, Mig. With \
                     several, the first claim decides what a GPU becomes and the last that leaves frees it.",
                    3,
                    &one_of("A mode.", &["Whole", "Mig", "TimeSlicing"]),
                ),
                "mig": mig(),
                "shares": shares(),
                "health": health(),
            }),
        ),
        json!({
            "x-kubernetes-validations": [
                rule(
                    "!has(self.mig) || !has(self.modes) || 'Mig' in self.modes",
                    "mig says nothing unless modes has Mig",
                ),
                rule(
                    "!has(self.shares) || has(self.modes) && 'TimeSlicing' in self.modes",
                    "shares says nothing unless modes has TimeSlicing",
                ),
            ],
        }),
    )
}

/// `mig` of a rule.
fn mig() -> Value {
    let profile = with(
        text("Name of a profile."),
        json!({ "maxLength": 32, "pattern": "^[0-9]{1,4}g\\.[0-9]{1,4}gb([+-][a-z.]+)?$" }),
    );
    with(
        object(
            "How GPUs are cut into MIG partitions.",
            json!({
                "profiles": set(
                    "Profiles that are offered, such as 1g.10gb; if left out, all but the rare ones (+me, +me.all, \
                     -me, +gfx). One that a GPU does not have is passed over.",
                    32, &profile,
                ),
                "placementOrder": one_of(
                    "Which place of a profile is tried first: Ascending (the default) from the first memory slice up, \
                     Descending from the last down.",
                    &["Ascending", "Descending"],
                ),
                "instances": one_of(
                    "Whose the GPU's MIG instances are: OnDemand (the default): the driver makes and removes them; \
                     Static: those that exist are offered, none is made or removed.",
                    &["OnDemand", "Static"],
                ),
            }),
        ),
        json!({ "minProperties": 1 }),
    )
}

/// `shares` of a rule.
fn shares() -> Value {
    with(
        object(
            "How GPUs are shared in time. Memory and cores are accounted, not enforced.",
            json!({
                "slots": with(
                    number("How many shares one GPU has at most.", 1, MOST_SLOTS.into()),
                    json!({ "format": "int32" }),
                ),
                "minMemory": memory("The smallest memory that a share is granted, such as 100Mi; rounded up to Mi."),
                "minCores": with(
                    number("The smallest part of the compute that a share is granted, in percent.", 0, 100),
                    json!({ "format": "int32" }),
                ),
                "reservedMemory": memory("Memory of the GPU that no share is granted, such as 2Gi; rounded up to Mi."),
            }),
        ),
        json!({ "minProperties": 1 }),
    )
}

/// `health` of a rule.
fn health() -> Value {
    object(
        "What happens when GPUs are sick.",
        json!({
            "evict": {
                "type": "boolean",
                "description": "Whether pods that use a sick GPU are evicted (taint effect NoExecute); false by default.",
            },
        }),
    )
}

/// An amount of memory.
fn memory(description: &str) -> Value {
    json!({
        "description": description,
        "anyOf": [{ "type": "integer" }, { "type": "string" }],
        "x-kubernetes-int-or-string": true,
        "pattern": "^[0-9]{1,15}(Ki|Mi|Gi|Ti|k|M|G|T)?$",
    })
}
