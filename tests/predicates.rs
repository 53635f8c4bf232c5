//! A function that is named as a question, such as `is_valid`, only answers. A reader who sees it in
//! a condition does not look for an effect there.

#![allow(clippy::unwrap_used, reason = "a panic is the report")]

use std::fs;
use std::path::Path;

use syn::visit::{self, Visit};
use syn::{FnArg, GenericArgument, PathArguments, ReceiverKind, ReturnType, Signature, Type};

/// The beginnings of the names of questions.
const QUESTIONS: &[&str] = &["is_", "are_", "has_", "have_", "may_", "can_"];

/// Files and folders that have only tests.
const FOR_TESTS: &[&str] = &["loom", "model.rs", "tests", "tests.rs"];

/// Questions that act, and are to get the name of what they do.
const KNOWN: &[&str] = &[
    "backend/zookeeper/events.rs: has_stored",
    "backend/zookeeper/line.rs: has_stored",
    "backend/zookeeper/standing.rs: is_not_alone",
];

#[test]
fn a_question_of_lockcore_only_answers() {
    assert_only_answers("../lockcore/src", KNOWN);
}

#[test]
fn a_question_of_the_layer_and_of_the_macro_only_answers() {
    assert_only_answers("../tower-layer/src", &[]);
    assert_only_answers("../lockmacro/src", &[]);
}

#[test]
fn a_question_that_acts_is_found() {
    let acts = "
        impl It {
            fn is_done(&mut self) -> bool { true }
            async fn is_told(&self, others: &mut Others) -> bool { true }
            fn has_ended(&self) { }
            fn may_go(&self) -> Result<(), Error> { Ok(()) }
        }
        fn is_noted(since: Instant) {}
    ";
    let answers = "
        impl It {
            fn is_done(&self) -> bool { true }
            fn has_ended(&self) -> Option<Instant> { None }
            fn note(&mut self) { }
        }
        impl Drop for It { fn drop(&mut self) {} }
        #[test]
        fn is_a_fact() {}
    ";

    assert_eq!(
        questions_that_act(acts),
        ["is_done", "is_told", "has_ended", "is_noted"]
    );
    assert_eq!(questions_that_act(answers), [""; 0]);
}

fn assert_only_answers(source: &str, known: &[&str]) {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join(source);
    let mut acts = Vec::new();
    read(&source, &source, &mut acts);
    acts.sort();
    assert_eq!(acts, known, "name these for what they do");
}

fn read(folder: &Path, root: &Path, acts: &mut Vec<String>) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if FOR_TESTS.iter().any(|name| path.ends_with(name)) {
            continue;
        }
        if path.is_dir() {
            read(&path, root, acts);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            let at = path.strip_prefix(root).unwrap().display().to_string();
            let names = questions_that_act(&fs::read_to_string(&path).unwrap());
            acts.extend(names.into_iter().map(|name| format!("{at}: {name}")));
        }
    }
}

/// The functions that are named as questions, and return nothing that could be an answer, or may
/// change what they are given.
fn questions_that_act(source: &str) -> Vec<String> {
    let mut found = Questions::default();
    found.visit_file(&syn::parse_file(source).unwrap());
    found.0
}

#[derive(Default)]
struct Questions(Vec<String>);

impl<'ast> Visit<'ast> for Questions {
    fn visit_item_mod(&mut self, module: &'ast syn::ItemMod) {
        if module.ident != "tests" {
            visit::visit_item_mod(self, module);
        }
    }

    fn visit_item_fn(&mut self, function: &'ast syn::ItemFn) {
        // The name of a test is a sentence, and may begin in any way.
        let is_test = |attribute: &syn::Attribute| attribute.path().is_ident("test");
        if !function.attrs.iter().any(is_test) {
            visit::visit_item_fn(self, function);
        }
    }

    fn visit_signature(&mut self, signature: &'ast Signature) {
        let name = signature.ident.to_string();
        let is_question = QUESTIONS.iter().any(|begins| name.starts_with(begins));
        let acts = answers_nothing(&signature.output) || signature.inputs.iter().any(is_changed);
        if is_question && acts {
            self.0.push(name);
        }
    }
}

fn answers_nothing(output: &ReturnType) -> bool {
    match output {
        ReturnType::Default => true,
        ReturnType::Type(_, output) => {
            matches!(&**output, Type::Tuple(tuple) if tuple.elems.is_empty())
        }
    }
}

fn is_changed(argument: &FnArg) -> bool {
    match argument {
        FnArg::Receiver(receiver) => {
            matches!(receiver.kind, ReceiverKind::Reference(_, _, Some(_)))
        }
        FnArg::Typed(argument) => can_be_changed(&argument.ty),
    }
}

/// Whether the type is `&mut T`, or contains one, as `Option<&mut T>` does.
fn can_be_changed(kind: &Type) -> bool {
    match kind {
        Type::Reference(of) => of.mutability.is_some(),
        Type::Path(path) => path.path.segments.iter().any(|segment| {
            match &segment.arguments {
            PathArguments::AngleBracketed(arguments) => arguments.args.iter().any(|argument| {
                matches!(argument, GenericArgument::Type(inner) if can_be_changed(inner))
            }),
            _ => false,
        }
        }),
        _ => false,
    }
}
