//! Tests of the floors of lockcore. A module may use modules on its own floor or below, and no
//! modules may use each other in a circle. The test reads from the sources which module uses which.
//! `ARCHITECTURE.md` of lockcore describes the floors.

#![allow(clippy::unwrap_used, reason = "a panic is the report")]

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::fs;
use std::path::Path;

use syn::punctuated::Punctuated;
use syn::visit::{self, Visit};
use syn::{Attribute, Item, ItemMod, ItemUse, Meta, Token, UseTree, Visibility};

/// The floors from top to bottom, each with its modules of the crate's root.
type Floors<'a> = &'a [(&'a str, &'a [&'a str])];

const LOCKCORE: Floors<'_> = &[
    (
        "what is built on locks",
        &[
            "__private",
            "fencing",
            "guide",
            "process_default",
            "stop",
            "testing",
        ],
    ),
    (
        "what users call",
        &[
            "adopt",
            "any",
            "barrier",
            "builder",
            "carry",
            "counter",
            "double_barrier",
            "election",
            "events",
            "inspect",
            "latch",
            "lock",
            "locks",
            "multi",
            "places",
            "revoke",
            "run",
            "rwlock",
            "semaphore",
            "upgrade",
            "value",
        ],
    ),
    ("what the running code holds", &["scope"]),
    ("hold", &["hold"]),
    ("acquire", &["acquire"]),
    ("client", &["client", "inversions"]),
    ("backend", &["backend"]),
    (
        "ground",
        &[
            "clock", "counting", "detached", "error", "fork", "hash", "log", "meter", "name",
            "options", "owner", "pauses", "queue", "request", "resizing", "sync", "tls", "token",
        ],
    ),
];

const LOCKMACRO: Floors<'_> = &[
    ("expansion", &["expand"]),
    (
        "input",
        &[
            "args", "function", "mistakes", "model", "output", "template",
        ],
    ),
];

const LOCKCORE_TOWER: Floors<'_> = &[
    (
        "what users call",
        &[
            "dashboard",
            "extract",
            "fence",
            "grpc",
            "layer",
            "problem",
            "work",
        ],
    ),
    (
        "requests on their way",
        &[
            "body", "ending", "future", "reserved", "response", "service",
        ],
    ),
    (
        "what a layer is set to",
        &["key", "keys", "refusal", "settings", "source", "template"],
    ),
    (
        "ground",
        &[
            "deadline",
            "frame",
            "guard",
            "header",
            "idempotency",
            "label",
            "names",
            "protocol",
            "read",
            "waiters",
        ],
    ),
];

#[test]
fn a_module_of_lockcore_tower_uses_only_what_stands_below_it() {
    assert_stands("../tower-layer/src", LOCKCORE_TOWER);
}

#[test]
fn a_module_of_lockcore_uses_only_what_stands_below_it() {
    assert_stands("../lockcore/src", LOCKCORE);
}

#[test]
fn a_module_of_lockmacro_uses_only_what_stands_below_it() {
    assert_stands("../lockmacro/src", LOCKMACRO);
}

#[test]
fn a_circle_and_a_use_of_a_higher_floor_are_found() {
    let source = tempfile::tempdir().unwrap();
    let file = |name: &str, text: &str| {
        let path = source.path().join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    };
    file("lib.rs", "mod up; mod down; mod aside; pub use up::Up;");
    file("up/mod.rs", "mod one; mod two; pub use one::Up;");
    file("up/one.rs", "use super::two::Two; pub struct Up(Two);");
    // Uses `up::one` through a re-export.
    file("up/two.rs", "pub struct Two(Option<Box<crate::Up>>);");
    file("down.rs", "fn f() { let _ = crate::aside::A; }");
    file(
        "aside.rs",
        "pub struct A; #[cfg(test)] mod tests { use crate::up::Up; }",
    );
    let floors: Floors<'_> = &[("top", &["up", "aside"]), ("bottom", &["down"])];

    let faults = faults(source.path(), floors);

    assert_eq!(
        faults,
        [
            "down (on the floor \"bottom\") uses aside, which stands on \"top\"",
            "a circle: up::one → up::two → up::one",
        ]
    );
}

fn assert_stands(source: &str, floors: Floors<'_>) {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join(source);
    let faults = faults(&source, floors);
    assert!(faults.is_empty(), "{}", faults.join("\n"));
}

fn faults(source: &Path, floors: Floors<'_>) -> Vec<String> {
    let modules = Modules::read(source);
    let uses = modules.uses();
    assert!(!uses.is_empty(), "no module uses another in {source:?}");
    let floor = |module: &str| {
        let root = module.split("::").next().unwrap();
        let at = floors.iter().position(|(_, roots)| roots.contains(&root));
        at.unwrap_or_else(|| panic!("{root} stands on no floor: give it one in tests/floors.rs"))
    };
    let mut faults = Vec::new();
    for (user, used) in uses
        .iter()
        .flat_map(|(user, all)| all.iter().map(move |used| (user, used)))
    {
        let (above, below) = (floor(user), floor(used));
        if below < above {
            let (own, other) = (floors[above].0, floors[below].0);
            faults.push(format!(
                "{user} (on the floor {own:?}) uses {used}, which stands on {other:?}"
            ));
        }
    }
    faults.extend(circles(&uses));
    faults
}

type Uses = BTreeMap<String, BTreeSet<String>>;

/// The circles of modules that use each other. A module of an earlier circle begins no other
/// circle.
fn circles(uses: &Uses) -> Vec<String> {
    let mut told = BTreeSet::new();
    let mut circles = Vec::new();
    for start in uses.keys() {
        if told.contains(start) {
            continue;
        }
        // Searches for the shortest way from `start` back to itself.
        let mut ways = vec![vec![start]];
        let mut seen = BTreeSet::new();
        let mut at = 0;
        while let Some(way) = ways.get(at).cloned() {
            at += 1;
            for next in uses.get(way[way.len() - 1]).into_iter().flatten() {
                if next == start {
                    told.extend(way.iter().map(|module| (*module).clone()));
                    let mut circle = "a circle: ".to_owned();
                    way.iter()
                        .for_each(|module| write!(circle, "{module} → ").unwrap());
                    circles.push(circle + start);
                    ways.clear();
                    break;
                }
                if seen.insert(next) {
                    let mut further = way.clone();
                    further.push(next);
                    ways.push(further);
                }
            }
        }
    }
    circles
}

/// The modules of a crate, by their paths from its root. The path of the root is "". Modules for
/// tests only are left out.
struct Modules(BTreeMap<String, Module>);

#[derive(Default)]
struct Module {
    /// The paths that this module uses, as they are written.
    paths: Vec<Vec<String>>,
    /// The paths that this module re-exports, by their public names.
    handed_on: BTreeMap<String, Vec<String>>,
    /// The names of the modules inside this module.
    children: BTreeSet<String>,
}

impl Modules {
    fn read(source: &Path) -> Self {
        let mut modules = Self(BTreeMap::new());
        modules.read_file(&source.join("lib.rs"), source, "");
        modules
    }

    /// Reads a file and the files of its child modules, which are in `folder`.
    fn read_file(&mut self, file: &Path, folder: &Path, path: &str) {
        let text = fs::read_to_string(file).unwrap_or_else(|error| panic!("{file:?}: {error}"));
        let syntax = syn::parse_file(&text).unwrap_or_else(|error| panic!("{file:?}: {error}"));
        let mut module = Module::default();
        let mut children = Vec::new();
        for item in &syntax.items {
            if let Item::Mod(child) = item
                && child.content.is_none()
                && !is_for_tests(&child.attrs)
            {
                children.push(child.ident.to_string());
            }
        }
        module.children.extend(children.iter().cloned());
        module.visit_file(&syntax);
        self.0.insert(path.to_owned(), module);
        for child in children {
            let inside = folder.join(&child);
            let flat = folder.join(format!("{child}.rs"));
            let file = if flat.exists() {
                flat
            } else {
                inside.join("mod.rs")
            };
            self.read_file(&file, &inside, &join(path, &child));
        }
    }

    /// The modules that each module uses. The root is left out: it only declares and re-exports.
    fn uses(&self) -> Uses {
        let mut uses = Uses::new();
        for (user, module) in self.0.iter().filter(|(user, _)| !user.is_empty()) {
            for path in &module.paths {
                if let Some(used) = self.resolve(user, path)
                    && used != *user
                    && !used.is_empty()
                {
                    uses.entry(user.clone()).or_default().insert(used);
                }
            }
        }
        uses
    }

    /// The module of this crate that defines the item at `path`.
    fn resolve(&self, user: &str, path: &[String]) -> Option<String> {
        let mut at = user.to_owned();
        let mut rest = path;
        match path.first()?.as_str() {
            "crate" => at.clear(),
            "self" => {}
            "super" => {
                while rest.first()? == "super" {
                    at = parent(&at).to_owned();
                    rest = &rest[1..];
                }
                return self.descend(at, rest);
            }
            child if self.0[user].children.contains(child) => return self.descend(at, rest),
            _another_crate => return None,
        }
        rest = &rest[1..];
        self.descend(at, rest)
    }

    fn descend(&self, mut at: String, path: &[String]) -> Option<String> {
        for (index, name) in path.iter().enumerate() {
            let module = &self.0[&at];
            if module.children.contains(name) {
                at = join(&at, name);
            } else if let Some(other) = module.handed_on.get(name) {
                let further = other.iter().chain(&path[index + 1..]);
                let further: Vec<_> = further.cloned().collect();
                return self.resolve(&at, &further);
            } else {
                break;
            }
        }
        Some(at)
    }
}

impl<'ast> Visit<'ast> for Module {
    fn visit_item_mod(&mut self, module: &'ast ItemMod) {
        if !is_for_tests(&module.attrs) {
            visit::visit_item_mod(self, module);
        }
    }

    fn visit_item_use(&mut self, item: &'ast ItemUse) {
        let is_handed_on = !matches!(item.vis, Visibility::Inherited);
        for (path, name) in leaves(&item.tree) {
            // A re-export of the module's own items does not count as a use.
            let first = path[0].as_str();
            let is_own = self.children.contains(first) || first == "self";
            if is_handed_on {
                self.handed_on.insert(name, path.clone());
            }
            if !(is_handed_on && is_own) {
                self.paths.push(path);
            }
        }
    }

    /// Skips the path in `pub(super)`, which is not a use.
    fn visit_visibility(&mut self, _: &'ast Visibility) {}

    fn visit_path(&mut self, path: &'ast syn::Path) {
        let segments = path.segments.iter();
        self.paths
            .push(segments.map(|segment| segment.ident.to_string()).collect());
        visit::visit_path(self, path);
    }
}

fn leaves(tree: &UseTree) -> Vec<(Vec<String>, String)> {
    match tree {
        UseTree::Path(path) => leaves(&path.tree)
            .into_iter()
            .map(|(mut rest, name)| {
                rest.insert(0, path.ident.to_string());
                (rest, name)
            })
            .collect(),
        UseTree::Name(name) => vec![(vec![name.ident.to_string()], name.ident.to_string())],
        UseTree::Rename(name) => vec![(vec![name.ident.to_string()], name.rename.to_string())],
        UseTree::Glob(_) => vec![(vec!["*".to_owned()], "*".to_owned())],
        UseTree::Group(group) => group.items.iter().flat_map(leaves).collect(),
    }
}

/// Whether an item has `#[cfg(test)]`, or a `cfg` with `test` and further conditions that must all
/// hold.
fn is_for_tests(attributes: &[Attribute]) -> bool {
    fn needs_test(condition: &Meta) -> bool {
        let all = Punctuated::<Meta, Token![,]>::parse_terminated;
        match condition {
            Meta::Path(path) => path.is_ident("test"),
            Meta::List(list) if list.path.is_ident("all") => {
                list.parse_args_with(all).unwrap().iter().any(needs_test)
            }
            _ => false,
        }
    }
    attributes.iter().any(|attribute| {
        attribute.path().is_ident("cfg") && needs_test(&attribute.parse_args().unwrap())
    })
}

fn join(path: &str, name: &str) -> String {
    match path {
        "" => name.to_owned(),
        path => format!("{path}::{name}"),
    }
}

fn parent(path: &str) -> &str {
    path.rsplit_once("::").map_or("", |(parent, _)| parent)
}
