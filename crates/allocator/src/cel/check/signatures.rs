//! What may be called with which types: the declarations of the environment, for the type check.

use std::collections::BTreeMap;
use std::sync::LazyLock;

use super::Ty;

/// Names that stand for a type.
pub(super) const TYPES: [&str; 13] = [
    "bool",
    "bytes",
    "double",
    "dyn",
    "int",
    "list",
    "map",
    "null_type",
    "optional_type",
    "string",
    "type",
    "uint",
    "kubernetes",
];

/// Functions and namespaces of Kubernetes' environment that are not implemented here.
pub(super) const KNOWN_ELSEWHERE: [&str; 14] = [
    "authorizer",
    "cidr",
    "duration",
    "format",
    "getHost",
    "ip",
    "isCIDR",
    "isIP",
    "isURL",
    "network",
    "timestamp",
    "url",
    "isCanonical",
    "validate",
];

/// One declaration a line: `[receiver.]name(arguments) result`. Generic types are written `dyn`: the check only
/// has to know what is certain. A namespaced function is written with a colon, `lists:range`.
const DECLARATIONS: &str = "
size(string) int\nsize(bytes) int\nsize(list) int\nsize(map) int
string.size() int\nbytes.size() int\nlist.size() int\nmap.size() int
string.contains(string) bool\nstring.startsWith(string) bool\nstring.endsWith(string) bool
string.matches(string) bool\nmatches(string,string) bool\nstring.find(string) string
string.findAll(string) strings
string(dyn) string\nint(dyn) int\nuint(dyn) uint\ndouble(dyn) double\nbool(dyn) bool\nbytes(dyn) bytes
type(dyn) type\ndyn(dyn) dyn
string.charAt(int) string\nstring.indexOf(string) int\nstring.indexOf(string,int) int
string.lastIndexOf(string) int\nstring.lastIndexOf(string,int) int\nlist.join() string\nlist.join(string) string
string.lowerAscii() string\nstring.upperAscii() string\nstring.trim() string\nstring.reverse() string
string.replace(string,string) string\nstring.replace(string,string,int) string
string.split(string) strings\nstring.split(string,int) strings
string.substring(int) string\nstring.substring(int,int) string\nstring.format(list) string
strings:quote(string) string
list.slice(int,int) list\nlist.flatten() list\nlist.flatten(int) list\nlist.distinct() list
list.reverse() list\nlist.sort() list\nlists:range(int) ints\nlist.@sortByAssociatedKeys(list) list
list.isSorted() bool\nlist.sum() dyn\nlist.min() dyn\nlist.max() dyn\nlist.first() optional\nlist.last() optional
list.indexOf(dyn) int\nlist.lastIndexOf(dyn) int\ndyn.includes(dyn) bool
sets:contains(list,list) bool\nsets:equivalent(list,list) bool\nsets:intersects(list,list) bool
optional:of(dyn) optional\noptional:none() optional\noptional:ofNonZeroValue(dyn) optional
optional.hasValue() bool\noptional.value() inner\noptional.or(optional) optional\noptional.orValue(dyn) inner
quantity(string) quantity\nisQuantity(string) bool\nquantity.sign() int\nquantity.isInteger() bool
quantity.asInteger() int\nquantity.asApproximateFloat() double
quantity.isGreaterThan(quantity) bool\nquantity.isLessThan(quantity) bool\nquantity.compareTo(quantity) int
quantity.add(quantity) quantity\nquantity.add(int) quantity\nquantity.sub(quantity) quantity\nquantity.sub(int) quantity
semver(string) semver\nsemver(string,bool) semver\nisSemver(string) bool\nisSemver(string,bool) bool
semver.major() int\nsemver.minor() int\nsemver.patch() int
semver.isGreaterThan(semver) bool\nsemver.isLessThan(semver) bool\nsemver.compareTo(semver) int
";

struct Signature {
    receiver: Option<Ty>,
    args: Vec<Ty>,
    result: Result,
}

/// A result type, or the type inside the receiver.
enum Result {
    Fixed(Ty),
    /// What the optional holds.
    Inner,
}

static TABLE: LazyLock<BTreeMap<(String, bool), Vec<Signature>>> = LazyLock::new(|| {
    let mut table: BTreeMap<(String, bool), Vec<Signature>> = BTreeMap::new();
    for line in DECLARATIONS.lines() {
        let Some((head, rest)) = line.split_once('(') else { continue };
        let Some((args, result)) = rest.split_once(") ") else { continue };
        let (receiver, name) = match head.split_once('.') {
            Some((receiver, name)) => (Some(ty(receiver)), name.to_owned()),
            None => (None, head.replace(':', ".")),
        };
        let args = args.split(',').filter(|a| !a.is_empty()).map(ty).collect();
        let result = if result == "inner" { Result::Inner } else { Result::Fixed(ty(result)) };
        table.entry((name, receiver.is_some())).or_default().push(Signature { receiver, args, result });
    }
    table
});

fn ty(name: &str) -> Ty {
    match name {
        "bool" => Ty::Bool,
        "int" => Ty::Int,
        "uint" => Ty::Uint,
        "double" => Ty::Double,
        "string" => Ty::String,
        "bytes" => Ty::Bytes,
        "type" => Ty::Type,
        "quantity" => Ty::Quantity,
        "semver" => Ty::Semver,
        "list" => Ty::list(Ty::Dyn),
        "strings" => Ty::list(Ty::String),
        "ints" => Ty::list(Ty::Int),
        "map" => Ty::map(Ty::Dyn, Ty::Dyn),
        "optional" => Ty::optional(Ty::Dyn),
        _ => Ty::Dyn,
    }
}

/// Whether a function, or a member function, of that name exists.
pub(super) fn declared(name: &str, member: bool) -> bool {
    TABLE.contains_key(&(name.to_owned(), member))
}

/// The results of the overloads that may match.
pub(super) fn matching<'a>(
    name: &str,
    target: Option<&'a Ty>,
    args: &'a [Ty],
) -> impl Iterator<Item = Ty> + 'a {
    let all = TABLE.get(&(name.to_owned(), target.is_some()));
    all.into_iter().flatten().filter_map(move |signature| {
        let receiver = match (&signature.receiver, target) {
            (Some(expected), Some(target)) => expected.fits(target),
            _ => true,
        };
        let same_length = signature.args.len() == args.len();
        let fits = receiver && same_length && signature.args.iter().zip(args).all(|(e, a)| e.fits(a));
        fits.then(|| match (&signature.result, target) {
            (Result::Fixed(ty), _) => ty.clone(),
            (Result::Inner, Some(Ty::Optional(inner))) => (**inner).clone(),
            (Result::Inner, _) => Ty::Dyn,
        })
    })
}
