//! Collects what is wrong with one attribute, so that the compiler shows all of it at once.

use proc_macro2::TokenStream;
use syn::Error;

#[derive(Default)]
pub(crate) struct Mistakes(Option<Error>);

impl Mistakes {
    pub(crate) fn push(&mut self, mistake: Error) {
        match &mut self.0 {
            Some(earlier) => earlier.combine(mistake),
            None => self.0 = Some(mistake),
        }
    }

    /// The value, or nothing and one more mistake.
    pub(crate) fn keep<T>(&mut self, result: syn::Result<T>) -> Option<T> {
        result.map_err(|mistake| self.push(mistake)).ok()
    }

    /// One `compile_error!` per mistake; `None` when there is none.
    pub(crate) fn compile_errors(&self) -> Option<TokenStream> {
        self.0.as_ref().map(Error::to_compile_error)
    }

    #[cfg(test)]
    pub(crate) fn messages(&self) -> Vec<String> {
        let mistakes = self.0.iter().flatten();
        mistakes.map(|mistake| mistake.to_string()).collect()
    }
}
