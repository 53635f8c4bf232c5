//! Checks the links of README and of every page that it reaches, for a reader on GitHub and for a
//! reader of the documentation.
//!
//! A page of the guide is read in both places. So its links have labels: `[text][Locks::ready]`.
//! GitHub takes the definition at the end of the page, which leads to a file. The documentation
//! takes the definition in `guide/links.md`, because this file is included in front of the page, and
//! the first definition counts. rustdoc itself checks where that one leads.

#![allow(clippy::unwrap_used, reason = "a panic is the report")]

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

const LABELS: &str = "lockcore/src/guide/links.md";

/// The pages that are included in the documentation.
fn guide() -> BTreeSet<PathBuf> {
    let folder = Path::new("lockcore/src/guide");
    let modules = read(&folder.join("mod.rs"));
    let included = modules.split("include_str!(\"").skip(1);
    let included = included.filter_map(|rest| rest.split('"').next());
    let pages = included.map(|page| plain(&folder.join(page)));
    pages.filter(|page| page != Path::new(LABELS)).collect()
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

fn read(file: &Path) -> String {
    let text = fs::read_to_string(root().join(file));
    text.unwrap_or_else(|error| panic!("{}: {error}", file.display()))
}

/// A path without `..`.
fn plain(path: &Path) -> PathBuf {
    let mut parts = Vec::new();
    for part in path {
        match part.to_str() {
            Some("..") => drop(parts.pop()),
            _ => parts.push(part),
        }
    }
    parts.iter().collect()
}

/// A page of Markdown.
struct Page {
    path: PathBuf,
    /// The targets of `[text](target)`.
    targets: BTreeSet<String>,
    /// The labels of `[text][label]`.
    labels: BTreeSet<String>,
    /// `[label]: target`.
    definitions: BTreeMap<String, String>,
    /// The names of the headings in a URL.
    anchors: BTreeSet<String>,
}

impl Page {
    fn read(path: &Path) -> Self {
        let mut page = Self {
            path: path.into(),
            targets: BTreeSet::new(),
            labels: BTreeSet::new(),
            definitions: BTreeMap::new(),
            anchors: BTreeSet::new(),
        };
        let mut text = String::new();
        let mut in_code = false;
        for line in read(path).lines() {
            let is_fence = line.trim_start().starts_with("```");
            in_code ^= is_fence;
            if in_code || is_fence {
                continue;
            }
            if let Some((label, target)) = definition(line) {
                page.definitions.insert(label.into(), target.into());
                continue;
            }
            let is_text = !line.trim().is_empty();
            assert!(
                page.definitions.is_empty() || !is_text,
                "{}: a line of text is behind the targets of links: {line}",
                path.display()
            );
            if line.starts_with('#') {
                page.anchors
                    .insert(anchor(line.trim_start_matches('#').trim()));
            }
            text += line;
            text.push('\n');
        }
        // Text in backticks contains no links, but may look like one.
        let text: Vec<_> = text.split('`').step_by(2).collect();
        let text = text.join("``");
        page.targets = between(&text, "](", ')');
        page.labels = between(&text, "][", ']');
        page
    }

    /// All targets on GitHub.
    fn all_targets(&self) -> impl Iterator<Item = &String> {
        self.targets.iter().chain(self.definitions.values())
    }

    /// The file of a target that is no URL, and the anchor in it.
    fn file<'a>(&self, target: &'a str) -> Option<(PathBuf, &'a str)> {
        if target.contains("://") {
            return None;
        }
        let (file, anchor) = target.split_once('#').unwrap_or((target, ""));
        let file = match file {
            "" => self.path.clone(),
            file => plain(&self.path.parent().unwrap().join(file)),
        };
        Some((file, anchor))
    }
}

/// `[label]: target`.
fn definition(line: &str) -> Option<(&str, &str)> {
    let (label, target) = line.strip_prefix('[')?.split_once("]: ")?;
    (!label.contains(']')).then_some((label, target))
}

/// The texts between each `open` and the next `close`.
fn between(text: &str, open: &str, close: char) -> BTreeSet<String> {
    let rests = text.split(open).skip(1);
    let found = rests.filter_map(|rest| rest.split_once(close));
    found.map(|(found, _)| found.replace('\n', " ")).collect()
}

/// The name of a heading in a URL, which GitHub and rustdoc make in the same way.
fn anchor(heading: &str) -> String {
    let heading = heading.to_lowercase();
    let kept = heading.chars().filter_map(|char| match char {
        ' ' => Some('-'),
        '-' | '_' => Some(char),
        char => char.is_alphanumeric().then_some(char),
    });
    kept.collect()
}

/// README, and the pages that its links lead to.
fn reached() -> Vec<Page> {
    let mut reached: Vec<Page> = Vec::new();
    let mut ahead = vec![PathBuf::from("README.md")];
    while let Some(path) = ahead.pop() {
        let is_page = path.extension().is_some_and(|extension| extension == "md");
        let exists = root().join(&path).exists();
        if !is_page || !exists || reached.iter().any(|page| page.path == path) {
            continue;
        }
        let page = Page::read(&path);
        let files = page.all_targets().filter_map(|target| page.file(target));
        ahead.extend(files.map(|(file, _)| file));
        reached.push(page);
    }
    reached
}

#[test]
fn every_link_of_a_page_that_readme_reaches_leads_somewhere_on_github() {
    let pages = reached();
    let mut dead = Vec::new();
    for page in &pages {
        let at = page.path.display();
        for label in &page.labels {
            if !page.definitions.contains_key(label) {
                dead.push(format!(
                    "{at}: no definition of [{label}] at the end of the page"
                ));
            }
        }
        for label in page.definitions.keys() {
            if !page.labels.contains(label) {
                dead.push(format!("{at}: nothing uses the definition of [{label}]"));
            }
        }
        for target in page.all_targets() {
            let Some((file, anchor)) = page.file(target) else {
                continue;
            };
            let there = pages.iter().find(|page| page.path == file);
            let has_anchor = |page: &Page| anchor.is_empty() || page.anchors.contains(anchor);
            if !there.map_or_else(|| root().join(&file).exists(), has_anchor) {
                dead.push(format!("{at}: nothing is at {target}"));
            }
        }
    }
    assert!(pages.len() > 10, "only {} pages", pages.len());
    assert!(dead.is_empty(), "{}", dead.join("\n"));
}

#[test]
fn every_link_of_the_guide_has_a_label_for_github_and_for_the_documentation() {
    let labels = read(Path::new(LABELS));
    let labels: BTreeMap<_, _> = labels.lines().filter_map(definition).collect();
    let (mut wrong, mut used) = (Vec::new(), BTreeSet::new());
    for path in guide() {
        let page = Page::read(&path);
        for target in page.targets {
            if !target.starts_with('#') && !target.contains("://") {
                wrong.push(format!("{}: write a label for {target}", path.display()));
            }
        }
        for (label, target) in page.definitions {
            // The name of the item, without its path and the anchor.
            let name = label.rsplit("::").next().unwrap();
            let file = plain(&path.parent().unwrap().join(&target));
            if target.ends_with(".rs") && !target.ends_with("mod.rs") && !read(&file).contains(name)
            {
                wrong.push(format!("{}: {label} is not in {target}", path.display()));
            }
            used.insert(label);
        }
    }
    for label in &used {
        // The path of the item, which may be in a module. rustdoc checks that the item is there.
        let is_path = |target: &&str| {
            let module = target.strip_prefix("crate::");
            let module = module.and_then(|path| path.strip_suffix(label.as_str()));
            module.is_some_and(|module| {
                let name = module.strip_suffix("::").unwrap_or(module);
                module.is_empty() || name != module && !name.contains("::")
            })
        };
        if !labels.get(label.as_str()).is_some_and(is_path) {
            wrong.push(format!(
                "{LABELS}: write [{label}]: crate::{label}, or its module between"
            ));
        }
    }
    let unused = labels.keys().filter(|label| !used.contains(**label));
    wrong.extend(unused.map(|label| format!("{LABELS}: nothing uses [{label}]")));
    assert!(used.len() > 100, "only {} labels", used.len());
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}
