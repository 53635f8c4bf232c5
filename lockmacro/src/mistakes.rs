//! Collects all mistakes in one attribute, so that the compiler shows them together.

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

    /// The value; or `None`, after the mistake has been added.
    pub(crate) fn keep<T>(&mut self, result: syn::Result<T>) -> Option<T> {
        result.map_err(|mistake| self.push(mistake)).ok()
    }

    /// One `compile_error!` per mistake; `None` if there are no mistakes.
    pub(crate) fn compile_errors(&self) -> Option<TokenStream> {
        self.0.as_ref().map(Error::to_compile_error)
    }

    #[cfg(test)]
    pub(crate) fn messages(&self) -> Vec<String> {
        let mistakes = self.0.iter().flatten();
        mistakes.map(|mistake| mistake.to_string()).collect()
    }
}
